"""The queue, its clients and producers on virtual time and a network that misbehaves. See `world.py`."""
