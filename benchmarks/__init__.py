"""Servekit measured against its peers, side by side."""
