"""Reading data: text, pairs, treebanks, images and synthetic tasks."""
