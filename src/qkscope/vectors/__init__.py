"""Vectors on disk: the predecessor's datasets in, a sample of a capture out, in one layout (see `layout`)."""
