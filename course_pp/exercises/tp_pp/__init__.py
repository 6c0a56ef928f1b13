"""Notebook 07: its exercises, and the lab that its cells import."""
