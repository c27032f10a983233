"""Tests of the layers."""
