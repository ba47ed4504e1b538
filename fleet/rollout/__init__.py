"""Rollouts: one command for many boards, wave by wave, each judged before the next begins."""
