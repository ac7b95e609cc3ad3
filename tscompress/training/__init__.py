"""Recovery by distillation (``recovery``) and pretraining (``pretraining``), on parts that both
share: batch shapes (``windows``), a stop that loses nothing (``loop``), and checkpoints
(``checkpoint``).
"""
