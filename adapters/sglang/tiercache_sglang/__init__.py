"""tiercache for SGLang: a HiCache storage backend that restores hybrid models."""
