"""How each schedule orders the actions of a rank: one module a family.

Most of them are one idea with another number: how many forwards a rank does before its first backward. Those are
written with :func:`course_pp.schedule.families.merge.merge`; the two V-shaped ones are phases spelled out
(:mod:`course_pp.schedule.families.phases`).
"""
