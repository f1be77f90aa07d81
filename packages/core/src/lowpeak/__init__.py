"""lowpeak: post-train language models on far longer sequences with the same GPU memory."""
