"""The push to the Hub (``push``, ``contents``, ``upload``), the model card (``card``,
``card_scores``), and what a checkpoint records of its origin (``origin``).
"""
