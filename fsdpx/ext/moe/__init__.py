"""Mixture-of-experts (MoE) layers."""
