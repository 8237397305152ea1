"""Attention of prompts on a Hopper GPU."""
