"""Contracts: what events are, how they look on the wire, and whether one version can read another."""
