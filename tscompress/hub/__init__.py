"""What a checkpoint says of its origin, its model card, and the push to the Hub."""
