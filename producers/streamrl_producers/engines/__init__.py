"""Inference engines behind one protocol, and the client that routes requests to them."""
