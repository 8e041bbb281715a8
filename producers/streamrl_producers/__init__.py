"""Producers: rollout workers, the engines that sample for them, routing, and receiving weights."""
