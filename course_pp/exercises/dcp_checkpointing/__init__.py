"""Notebook 09: its exercises, and the lab that its cells import."""
