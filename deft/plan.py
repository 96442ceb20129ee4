"""Plan: the one intermediate form every strategy emits (see docs/plan.md). Filled in shortly."""
