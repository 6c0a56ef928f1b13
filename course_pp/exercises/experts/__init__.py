"""Notebook 12: its exercises, and the lab that its cells import."""
