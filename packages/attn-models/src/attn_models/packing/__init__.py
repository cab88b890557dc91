"""Models as they are served: weights packed once, in a format with fewer bytes where that is asked for."""
