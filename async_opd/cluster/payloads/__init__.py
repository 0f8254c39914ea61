"""Payloads that stay on the nodes which made them, in Ray's object stores (ADR 25)."""
