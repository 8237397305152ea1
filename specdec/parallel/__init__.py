"""One engine on several GPUs of a host: what each holds, and what they exchange."""
