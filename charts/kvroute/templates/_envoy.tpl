{{/* Envoy's bootstrap. Parts shared with the local stack come from files/envoy.json, which tests/chart generates from
     kvroute/envoy.yaml; addresses, several routers, probes and metrics are added here. */}}

{{- define "kvroute.envoy.bootstrap" -}}
{{- $parts := .Files.Get "files/envoy.json" | fromJson -}}
{{- $listener := $parts.listener -}}
{{- $manager := (index (index $listener.filter_chains 0).filters 0).typed_config -}}
{{- $stream := ternary "ext_proc_full" "ext_proc_skip" (eq .Values.envoy.responses "full") -}}
{{- $door := ternary $stream .Values.envoy.door (eq .Values.envoy.door "ext_proc") -}}
{{- $filter := mergeOverwrite (index $parts.doors $door) (include "kvroute.envoy.doorPatch" . | fromYaml) -}}
{{- $_ := set $manager "http_filters" (prepend $manager.http_filters $filter) -}}
{{- $host := index $manager.route_config.virtual_hosts 0 -}}
{{- $routes := ternary $parts.fail_open_routes $host.routes .Values.envoy.failOpen -}}
{{- if eq .Values.envoy.responses "usage" -}}
{{- $_ := set $manager "http_filters" (list $filter $parts.usage.filter (last $manager.http_filters)) -}}
{{- $_ := set $host "request_headers_to_remove" $parts.usage.removed -}}
{{- range $route := $routes -}}
{{- with index $parts.usage.routes (default "" $route.match.path) -}}{{- $_ := set $route "typed_per_filter_config" . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $extras := list -}}
{{- range $extra := .Values.paths.extra -}}
{{- /* Copies of the first inference path's routes: one, or two if Envoy fails open. */ -}}
{{- range $route := ternary (list (index $routes 0) (index $routes 1)) (list (index $routes 0)) $.Values.envoy.failOpen -}}
{{- $copy := omit (deepCopy $route) "typed_per_filter_config" -}}
{{- $_ := set $copy.match "path" $extra.path -}}
{{- $_ := set (index $copy.match.headers 0) "string_match" (dict "exact" $extra.method) -}}
{{- $extras = append $extras $copy -}}
{{- end -}}
{{- end -}}
{{- $_ := set $host "routes" (concat $extras $routes) -}}
{{- $patches := include "kvroute.envoy.clusterPatches" . | fromYaml -}}
{{- $clusters := list ($patches.admin) -}}
{{- range $name := concat (list "picked_pod" "router") (ternary (list "round_robin") list .Values.envoy.failOpen) -}}
{{- $cluster := mergeOverwrite (index $parts.clusters $name) (index $patches $name) -}}
{{- if hasKey $cluster "cluster_type" -}}{{- $cluster = omit $cluster "type" -}}{{- end -}}
{{- $clusters = append $clusters $cluster -}}
{{- end -}}
{{- $patched := include "kvroute.envoy.bootstrapPatch" . | fromYaml -}}
{{- $_ := set $patched.static_resources "listeners" (prepend $patched.static_resources.listeners $listener) -}}
{{- $_ := set $patched.static_resources "clusters" $clusters -}}
{{- toPrettyJson $patched -}}
{{- end -}}

{{- define "kvroute.envoy.bootstrapPatch" -}}
node: {id: {{ include "kvroute.fullname" . }}-envoy, cluster: kvroute}
# Bound to loopback, because the admin API can stop Envoy.
admin:
  address: {socket_address: {address: 127.0.0.1, port_value: 9901}}
static_resources:
  listeners:
    # Readiness and metrics, the only pages of the admin API that other pods can reach.
    - name: status
      address: {socket_address: {address: 0.0.0.0, port_value: 8082}}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: status
                http_filters:
                  # Returns 503 while the pod drains.
                  - name: envoy.filters.http.health_check
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.health_check.v3.HealthCheck
                      pass_through_mode: false
                      headers: [{name: ":path", string_match: {exact: /ready}}]
                  - name: envoy.filters.http.router
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
                route_config:
                  virtual_hosts:
                    - name: status
                      domains: ["*"]
                      routes:
                        - match:
                            path: /metrics
                            headers: [{name: ":method", string_match: {exact: GET}}]
                          route: {cluster: admin, prefix_rewrite: /stats/prometheus}
{{- end -}}

{{/* Calls to a failed router are retried at another router; the last retries use the Service's own address. */}}
{{- define "kvroute.envoy.doorPatch" -}}
typed_config:
  {{- if ne .Values.envoy.door "ext_proc" }}
  failure_mode_allow: {{ .Values.envoy.failOpen }}
  with_request_body: {max_request_bytes: {{ int64 .Values.router.maxRequestBytes }}}
  {{- end }}
  grpc_service:
    retry_policy:
      num_retries: 5
      # LEAST_REQUEST prefers a dead router, which has the fewest requests, so retries must reselect often.
      host_selection_retry_max_attempts: 20
      retry_priority:
        name: envoy.retry_priorities.previous_priorities
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.retry.priority.previous_priorities.v3.PreviousPrioritiesConfig
          update_frequency: 3
{{- end -}}

{{- define "kvroute.envoy.clusterPatches" -}}
picked_pod: {}
router:
  {{- include "kvroute.envoy.routerPatch" . | nindent 2 }}
round_robin:
  {{- include "kvroute.envoy.dns" . | nindent 2 }}
  load_assignment:
    cluster_name: round_robin
    endpoints:
      - lb_endpoints:
          {{- range include "kvroute.targetPorts" . | fromJsonArray }}
          - endpoint: {address: {socket_address: {address: {{ include "kvroute.host" (list $ "-models") }}, port_value: {{ . }}}}}
          {{- end }}
admin:
  name: admin
  type: STATIC
  connect_timeout: 1s
  load_assignment:
    cluster_name: admin
    endpoints:
      - lb_endpoints:
          - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 9901}}}
{{- end -}}

{{/* Cluster of the routers: priority 0 by pod address, priority 1 by the Service. */}}
{{- define "kvroute.envoy.routerPatch" -}}
{{- $root := . -}}
lb_policy: LEAST_REQUEST
{{ include "kvroute.envoy.dns" $root }}
load_assignment:
  cluster_name: router
  endpoints:
    # DNS may lag half a minute behind the pods; the Service's address does not.
    {{- range $priority, $suffix := list "-epp-pods" "-epp" }}
    - priority: {{ $priority }}
      lb_endpoints:
        - endpoint:
            address: {socket_address: {address: {{ include "kvroute.host" (list $root $suffix) }}, port_value: 9002}}
            health_check_config: {port_value: 9002}
    {{- end }}
# Envoy's default limit is 3 concurrent retries.
circuit_breakers:
  thresholds:
    - {priority: DEFAULT, max_connections: 1000000000, max_pending_requests: 1000000000, max_requests: 1000000000, max_retries: 1000000000}
{{- end -}}

{{/* Cluster type with periodic DNS lookups, each address being an endpoint. */}}
{{- define "kvroute.envoy.dns" -}}
cluster_type:
  name: envoy.cluster.dns
  typed_config:
    "@type": type.googleapis.com/envoy.extensions.clusters.dns.v3.DnsCluster
    dns_lookup_family: V4_PREFERRED
    dns_refresh_rate: 2s
    dns_failure_refresh_rate: {base_interval: 1s, max_interval: 2s}
    typed_dns_resolver_config:
      name: envoy.network.dns_resolver.cares
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig
        # Names are fully qualified.
        dns_resolver_options: {no_default_search_domain: true}
{{- end -}}
