"""Notebook 08: its exercises, and the lab that its cells import."""
