"""Language models that see images: a tower over patches whose rows stand among the embeddings of a prompt."""
