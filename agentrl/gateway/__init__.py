"""Agents that call a chat API, played as episodes: every call is recorded with its exact tokens and
its lineage.
"""
