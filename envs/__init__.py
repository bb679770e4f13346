"""Environment families, each a gymnasium.Env with a uint8 (H, W, 3) observation; env_wrapper.make_env builds them."""
