"""Names of the files in a checkpoint directory, and of the shipped references."""

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
#: Of an adapter (LoRA), which peft writes.
ADAPTER_FILE = "adapter_config.json"
PLAN_FILE = "plan.json"
#: Keys of a config that say where it was loaded from, perhaps on somebody's disk.
PLACE_KEYS = ("_name_or_path", "name_or_path")
PROVENANCE_FILE = "provenance.json"
REFERENCE_PREFIX = "reference/"
#: In the config.json of a factored checkpoint, so that stock software refuses it.
MODEL_TYPE = "tscompress"
PIPELINE_CLASS = "FactoredChronosPipeline"
