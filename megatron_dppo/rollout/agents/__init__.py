"""Agents that talk with the policy as with an OpenAI-compatible server."""
