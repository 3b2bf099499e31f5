"""Budget in, plan out: profiles of a step, plans under a limit, and the largest batch that fits."""
