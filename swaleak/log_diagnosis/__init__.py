"""Finds leak messages in a server log and works out what they mean. Needs no torch."""
