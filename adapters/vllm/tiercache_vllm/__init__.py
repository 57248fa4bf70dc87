"""tiercache for vLLM: a KV connector that restores hybrid models."""
