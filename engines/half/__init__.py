"""The float16 form of a graph: strongly typed runtimes take precision from the graph alone.

convert   half_precision: the typed graph, and the nodes that stay float32 with the reason
ranges    beyond_half: nodes whose values float16 cannot hold
"""
