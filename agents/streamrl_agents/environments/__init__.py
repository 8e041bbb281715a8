"""Environments that come with streamrl, written as a user would write them."""
