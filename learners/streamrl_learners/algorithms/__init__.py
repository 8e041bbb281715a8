"""Advantages, policy losses and corrections: independent registries of small pure functions."""
