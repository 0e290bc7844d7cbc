"""The pair: loading, chat rendering, laws, verification, caches and lossless generation."""
