"""A cluster on Ray Serve: the deployments and the calls between them. `paceline.cluster` takes the decisions.

    HTTP ──> Serve's proxy ──> Ingress: the application of `paceline serve`, over a ClusterEngine for each model
                                  │  RayCalls ──> PrefixRequestRouter (in the ingress's process)
                                  └──────────────> EngineReplica: WorkerEngine, several replicas a model

`cluster_config` reads the file of `paceline cluster serve`, `deploy` starts the deployments. `deploy`, `ray_calls` and
`request_router` import Ray, which is the extra `paceline[ray]`; nothing else does.
"""
