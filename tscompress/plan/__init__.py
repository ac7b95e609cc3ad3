"""What a model has and what becomes of it, as plain data without torch. Read ``architecture``
first, then ``plan`` and ``schedules``.
"""
