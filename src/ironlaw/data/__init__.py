"""Text in, token batches out: corpora, tokenizers, memory-mapped token files, resumable batches."""
