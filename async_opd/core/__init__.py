"""Shared by all rooms: errors, the messages between stages, the Protocols of the stages.

Imports nothing of the project but itself, and neither torch, ray, vllm nor transformers.
"""
