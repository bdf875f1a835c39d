"""The asynchronous rollout/train loop: read `loop.py` from top to bottom."""
