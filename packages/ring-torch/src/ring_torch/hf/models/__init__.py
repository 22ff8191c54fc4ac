"""Language models of transformers: batches that are split, and which models are exact on them.

May import ``sharding`` and what is below; transformers is not imported.
"""
