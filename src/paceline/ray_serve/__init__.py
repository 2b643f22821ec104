"""Replicas of models on Ray Serve: what a cluster is made of, apart from the decisions, which are `paceline.cluster`'s.

    HTTP ──> Serve's proxy ──> Ingress: the application of `paceline serve`, over a ClusterEngine for each model
                                  │  RayCalls ──> PrefixRequestRouter (in the ingress's process)
                                  └──────────────> EngineReplica: WorkerEngine, one of several

`cluster_config` reads the file of `paceline cluster serve`, `deploy` starts what it says. Ray is imported by the other modules,
which are imported late; it is the extra `paceline[ray]`.
"""
