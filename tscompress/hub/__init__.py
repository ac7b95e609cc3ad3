"""The push to the Hub (``push``, ``contents``, ``upload``), the model card (``card``,
``card_scores``), and the records of a checkpoint (``origin``).
"""
