"""How do I start it?

The shell command `tfdist-ext`: `run` starts a script on a local cluster and supervises it, `doctor` explains
TF_CONFIG, `demo` shows that the result equals one device's, `inspect` lists checkpoints.
Nothing here imports TensorFlow at start.
"""
