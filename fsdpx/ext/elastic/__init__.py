"""Elastic training: ranks that are lost, that leave and that join."""
