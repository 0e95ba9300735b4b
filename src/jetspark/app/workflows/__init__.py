"""Workflows: runs that react to events over days, one step at a time, each step stored whole or not at all."""
