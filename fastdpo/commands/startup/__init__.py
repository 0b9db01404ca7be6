"""Added to PYTHONPATH by `fastdpo run`, so that each Python process of a program runs `sitecustomize`."""
