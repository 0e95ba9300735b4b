"""Checks of an application without a server: names, contracts, purity; and the documents made of its contracts."""
