{{- define "kimistack.name" -}}
{{- .Values.nameOverride | default (printf "%s-operator" .Release.Name) | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Name of objects outside namespaces: another release has others. */}}
{{- define "kimistack.clusterName" -}}
{{ .Release.Namespace }}:{{ include "kimistack.name" . }}
{{- end -}}

{{- define "kimistack.selector" -}}
app.kubernetes.io/name: kimistack-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kimistack.labels" -}}
{{ include "kimistack.selector" . }}
app.kubernetes.io/part-of: kimistack
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "kimistack.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* Namespaces the operator looks at, in order. */}}
{{- define "kimistack.namespaces" -}}
{{- .Values.namespaces | default (list .Release.Namespace) | uniq | sortAlpha | join "," -}}
{{- end -}}

{{- define "kimistack.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kimistack.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* A role and its binding to an account. Takes root, role, rules and optionally namespace,
account, annotations. */}}
{{- define "kimistack.granted" -}}
{{- $kind := ternary "Role" "ClusterRole" (hasKey . "namespace") -}}
{{- $account := .account | default (include "kimistack.name" .root) -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}
metadata:
  name: {{ .role | quote }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- include "kimistack.labels" .root | nindent 4 }}
  {{- with .annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
rules: {{- toYaml .rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}Binding
metadata:
  name: {{ .role | quote }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- include "kimistack.labels" .root | nindent 4 }}
  {{- with .annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ $kind }}
  name: {{ .role | quote }}
subjects:
  - kind: ServiceAccount
    name: {{ $account }}
    namespace: {{ .root.Release.Namespace }}
{{- end -}}

{{/* A Job that runs one command of the operator's image. Takes root, name, account, annotations
and args. */}}
{{- define "kimistack.hookJob" -}}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "kimistack.labels" .root | nindent 4 }}
  annotations: {{- toYaml .annotations | nindent 4 }}
spec:
  backoffLimit: 2
  activeDeadlineSeconds: 300
  template:
    metadata:
      labels:
        app.kubernetes.io/name: kimistack-hook
        app.kubernetes.io/instance: {{ .root.Release.Name }}
    spec:
      restartPolicy: Never
      serviceAccountName: {{ .account }}
      automountServiceAccountToken: true
      securityContext: {{- include "kimistack.podSecurity" .root | nindent 8 }}
      {{- with .root.Values.imagePullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .root.Values.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .root.Values.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      containers:
        - name: kimistack
          image: {{ include "kimistack.image" .root | quote }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          command: [kimistack]
          args: {{- toYaml .args | nindent 12 }}
          terminationMessagePolicy: FallbackToLogsOnError
          resources:
            requests: {cpu: 50m, memory: 128Mi}
            limits: {memory: 512Mi}
          securityContext: {{- include "kimistack.containerSecurity" .root | nindent 12 }}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
      volumes:
        - name: tmp
          emptyDir: {sizeLimit: 64Mi}
{{- end -}}
