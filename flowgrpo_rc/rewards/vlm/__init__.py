"""Vision-language models that answer questions about pictures, and what answers say."""
