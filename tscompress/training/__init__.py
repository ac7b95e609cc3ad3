"""Recovery by distillation and pretraining, on a loop that stops and resumes without loss
(``loop``).
"""
